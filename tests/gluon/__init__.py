"""Runs Gluon (Triton 3.6) kernels for Hopper on the CPU with numpy, and says aloud what they do wrong.

The Python source of a kernel runs, Gluon's or plain Triton's, and the host code around it, on CPU tensors. Found are
wrong numbers, wrong phases, deadlocks, races, missing waits and fences, accesses out of bounds, wrong byte counts.
Not found is what a compiler finds: layouts that do not match, types that change over a loop, spilled registers.

What is emulated
- The partitions of `warp_specialize` are threads of which one runs. A seeded scheduler chooses who goes on at every
  access of a barrier, of memory, or of an asynchronous unit. One to three CTAs are resident. Nobody can go on:
  `Deadlock`, with what each waits for.
- mbarriers: parity, arrivals, transaction bytes. TMA loads, stores and reductions happen at a random later step; the
  write to global memory later still. wgmma reads its operands between issue and the wait that covers it, and its
  result can be used only as `warpgroup_mma_wait` gave it out.
- Shared memory has the card's addresses (panels, swizzles), so it can be reinterpreted. It begins as NaN.
- Races, by happens-before (vector clocks over grains of 16 bytes): an access that no barrier or wait orders after an
  earlier one is an error whatever the interleaving was. So is reading what nobody wrote, a missing
  `fence_async_shared`, and anything in flight at the end.
- Integers of 32 bits wrap and divide towards 0; a run-time value for a constexpr is an error.
- Inline PTX with forward branches, by the table in `ptx_table`.

What is not: the threads of one partition against each other (a missing `thread_barrier`), registers, timing, the
shorter sums of FP8 wgmma (sums are FP32 here).

A kernel and its launch:

    module = loader.load_module("src", "assay.flash.kernels.x")  # what it imports below src is emulated too
    errors.options.seed = 7                                      # the same number, the same interleaving
    module.kernel[(grid,)](memory.TensorDescriptor(x, shape, strides, block, layout), tensor, 3, num_warps=4)

To add a function of `gl`: write it on `Tensor` in `language`, `mathematics` or `access` and put its name into the list
of `triton_modules`. A PTX instruction: a line in `ptx_table`. A call of a user's `@builtin`: a method in
`builtin_functions`. `errors.Options` says what can be turned off.
"""
