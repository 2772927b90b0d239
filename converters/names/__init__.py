"""Relations between the names (and layouts) that different frameworks give the same model's tensors."""
