"""PyTorch's own: DCP (FSDP1, FSDP2), one torch file (`full`), files of one rank each (`fsdp-ranks`)."""
