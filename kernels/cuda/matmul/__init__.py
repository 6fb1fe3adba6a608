"""Matrix products on CUDA cores and tensor cores, their epilogues, and the dispatcher."""
