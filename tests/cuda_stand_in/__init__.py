"""A library that stands in for the CUDA driver, the runtime, cuBLAS and NCCL; see README.md."""
