"""PyTorch Distributed Checkpoint: `.metadata`, `*.distcp` and safetensors shards."""
