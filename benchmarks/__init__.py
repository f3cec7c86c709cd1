"""Speed and memory, beside a peer in the same run."""
