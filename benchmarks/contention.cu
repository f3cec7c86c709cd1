// What else a scheduler's warps can do while the tensor cores multiply.
// Warpgroup 0 multiplies until the others are done; warpgroups 1 and 2 (or 1 alone) execute one kind of instruction.
// nvcc -arch=sm_90a -std=c++17 -O3 -o contention benchmarks/contention.cu && ./contention
#include <cstdio>
#include <cstdint>
#include <cuda_runtime.h>
#define CHECK(x) do { cudaError_t e = (x); if (e) { printf("%s: %s\n", #x, cudaGetErrorString(e)); return 1; } } while (0)
enum Product { NONE, BF16_SS, FP8_SS, FP8_RS, BF16_RS };
enum Work { IDLE, EX2, FFMA, FADD, FMNMX, CVT8, FMUL, MIX, FULL };

__device__ __forceinline__ uint64_t descriptor(uint32_t address) {
  // 128-byte swizzle, rows of 128 bytes
  return (uint64_t)((address & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}
#define R4(i) "+f"(d[i]), "+f"(d[i+1]), "+f"(d[i+2]), "+f"(d[i+3])
#define R16(i) R4(i), R4(i+4), R4(i+8), R4(i+12)
#define R64 R16(0), R16(16), R16(32), R16(48)
#define LIST64 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}"

template <int P> __device__ __forceinline__ void product(float (&d)[64], uint64_t a, uint64_t b, uint32_t (&r)[4]) {
  if constexpr (P == BF16_SS)
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " LIST64 ", %64, %65, 1, 1, 1, 0, 0;" : R64 : "l"(a), "l"(b));
  if constexpr (P == FP8_SS)
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 " LIST64 ", %64, %65, 1, 1, 1;" : R64 : "l"(a), "l"(b));
  if constexpr (P == FP8_RS)
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 " LIST64 ", {%64,%65,%66,%67}, %68, 1, 1, 1;" : R64 : "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]), "l"(b));
  if constexpr (P == BF16_RS)
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " LIST64 ", {%64,%65,%66,%67}, %68, 1, 1, 1, 0;" : R64 : "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]), "l"(b));
}


template <int P> __device__ void multiply(int products, int pause, long long* cycles, float* sink, uint32_t base) {
  float d[64];
  for (int i = 0; i < 64; i++) d[i] = 0;
  uint32_t r[4] = {threadIdx.x, threadIdx.x * 3, threadIdx.x * 5, threadIdx.x * 7};
  uint64_t a = descriptor(base), b = descriptor(base + 16384);
  long long begin = clock64(), middle = begin;
#pragma unroll 1
  for (int n = 0; n < products; n += 16) {
    if (n == 800) middle = clock64();
    asm volatile("wgmma.fence.sync.aligned;");
#pragma unroll
    for (int i = 0; i < 16; i++) product<P>(d, a + (i & 3) * 2, b + (i & 3) * 2, r);
    asm volatile("wgmma.commit_group.sync.aligned;");
    asm volatile("wgmma.wait_group.sync.aligned 0;");
    if (pause) __nanosleep(pause);
  }
  long long end = clock64();
  float s = 0;
  for (int i = 0; i < 64; i++) s += d[i];
  sink[threadIdx.x] = s;
  if (threadIdx.x == 0) { cycles[0] = middle - begin; cycles[3] = end - begin; }
}

template <int W> __device__ void work(int rounds, long long* cycles, float* sink) {
  float x[64], o[64];
  for (int i = 0; i < 64; i++) x[i] = threadIdx.x * 0.01f + i * 0.001f, o[i] = x[i];
  float unit = 0.5f + threadIdx.x * 1e-9f, reference = threadIdx.x * 1e-7f, m = -1e30f, sum0 = 0, sum1 = 0;
  uint32_t packed = 0;
  __nanosleep(2000);
  long long begin = clock64();
#pragma unroll 1
  for (int n = 0; n < rounds; n++) {
#pragma unroll
    for (int i = 0; i < 64; i++) {
      if (W == EX2) asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(x[i]));
      if (W == FFMA) asm volatile("fma.rn.f32 %0, %0, %1, %2;" : "+f"(x[i]) : "f"(unit), "f"(reference));
      if (W == FADD) asm volatile("add.f32 %0, %0, %1;" : "+f"(x[i]) : "f"(unit));
      if (W == FMUL) asm volatile("mul.f32 %0, %0, %1;" : "+f"(x[i]) : "f"(unit));
      if (W == FMNMX) asm volatile("max.f32 %0, %0, %1;" : "+f"(x[i]) : "f"(unit));
    }
    if (W == CVT8) {
#pragma unroll
      for (int i = 0; i < 64; i += 2) { uint16_t h; asm volatile("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(h) : "f"(x[i]), "f"(x[i + 1])); x[i] += h; }
    }
    if (W == MIX || W == FULL) {  // a block's softmax: FULL has the maximum and the output's factors, too
      float ma = -1e30f, mb = -1e30f;
      if (W == FULL) {
#pragma unroll
        for (int i = 0; i < 64; i += 2) { ma = fmaxf(ma, x[i]); mb = fmaxf(mb, x[i + 1]); }
        ma = fmaxf(ma, __shfl_xor_sync(0xffffffff, ma, 1)); mb = fmaxf(mb, __shfl_xor_sync(0xffffffff, mb, 1));
        ma = fmaxf(ma, __shfl_xor_sync(0xffffffff, ma, 2)); mb = fmaxf(mb, __shfl_xor_sync(0xffffffff, mb, 2));
      } else ma = mb = reference;
      float fa = 1.0f + ma * 1e-9f, fb = 1.0f + mb * 1e-9f;
#pragma unroll
      for (int i = 0; i < 64; i += 4) {
        float e[4];
#pragma unroll
        for (int j = 0; j < 4; j++) { float y = fmaf(x[i + j], unit, (j & 1) ? mb : ma); asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(e[j]) : "f"(y)); }
        sum0 += e[0] + e[2]; sum1 += e[1] + e[3];
        uint32_t both;
        asm volatile("{ .reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, %2, %1; cvt.rn.satfinite.e4m3x2.f32 h, %4, %3; mov.b32 %0, {l, h}; }" : "=r"(both) : "f"(e[0]), "f"(e[1]), "f"(e[2]), "f"(e[3]));
        x[i] = __uint_as_float(both); x[i + 1] = e[1]; x[i + 2] = e[2]; x[i + 3] = e[3];
      }
      if (W == FULL) {
#pragma unroll
        for (int i = 0; i < 64; i += 2) { o[i] *= fa; o[i + 1] *= fb; }
      }
    }
  }
  long long end = clock64();
  float s = m + sum0 + sum1 + packed;
  for (int i = 0; i < 64; i++) s += x[i] + o[i];
  sink[threadIdx.x] = s;
  if ((threadIdx.x & 127) == 0) *cycles = end - begin;
}

template <int P, int W> __global__ void __launch_bounds__(384, 1) both(int products, int pause, int rounds, long long* cycles, float* sink) {
  extern __shared__ __align__(1024) uint8_t memory[];
  uint32_t base = (uint32_t)__cvta_generic_to_shared(memory);
  for (int i = threadIdx.x; i < 49152 / 4; i += 384) ((uint32_t*)memory)[i] = 0x38343c30u + (i * 2654435761u & 0x07070707u);
  asm volatile("fence.proxy.async.shared::cta;");
  __syncthreads();
  int group = threadIdx.x / 128;
  long long* mine = cycles + blockIdx.x * 4;
  if (group == 0) { if constexpr (P != NONE) multiply<P>(products, pause, mine, sink, base); }
  else if constexpr (W != IDLE) work<W>(rounds, mine + group, sink);
}

template <int P, int W> int run(const char* p, const char* w, double per_round, double cost, int pause = 0) {
  long long* cycles; float* sink;
  int rounds = (int)(150000 / (2 * per_round * cost));
  CHECK(cudaMalloc(&cycles, 132 * 4 * 8)); CHECK(cudaMalloc(&sink, 4096));
  CHECK(cudaMemset(cycles, 0, 132 * 4 * 8));
  CHECK(cudaFuncSetAttribute(both<P, W>, cudaFuncAttributeMaxDynamicSharedMemorySize, 49152 + 1024));
  for (int i = 0; i < 2; i++) both<P, W><<<132, 384, 49152 + 1024>>>(W == IDLE ? 1600 : 8000, pause, rounds, cycles, sink);
  CHECK(cudaDeviceSynchronize());
  long long c[4];
  CHECK(cudaMemcpy(c, cycles, 32, cudaMemcpyDeviceToHost));
  printf("%-8s %-6s", p, w);
  if (c[0]) printf("  product %6.1f cycles (busy %3.0f%%)", c[0] / 800.0, 6400.0 * 800 / c[0]); else printf("  %33s", "");
  if (c[1]) printf("   %7.2f", (double)c[1] / rounds / (W >= MIX ? 1 : 2 * per_round));
  if (c[1] && c[3] && c[3] < c[1]) printf("  (products ended first)");
  printf("\n");
  cudaFree(cycles); cudaFree(sink);
  return 0;
}
#define MORE(P, pause) run<P, MIX>(#P, "MIX", 64, 9, pause) || run<P, FULL>(#P, "FULL", 64, 11, pause)
#define ALL(P) run<P, IDLE>(#P, "-", 64, 8) || run<P, EX2>(#P, "EX2", 64, 8) || run<P, FFMA>(#P, "FFMA", 64, 1) || run<P, FADD>(#P, "FADD", 64, 1) || run<P, FMUL>(#P, "FMUL", 64, 1) || run<P, FMNMX>(#P, "FMNMX", 64, 2) || run<P, CVT8>(#P, "CVT8", 32, 2) || MORE(P, 0)
int main() {
  if (ALL(NONE) || ALL(BF16_SS) || ALL(FP8_SS) || ALL(FP8_RS)) return 1;
  puts("products half of the time");
  return MORE(BF16_SS, 500) || MORE(FP8_SS, 500) || MORE(FP8_RS, 500);
}
