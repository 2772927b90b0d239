"""The trainer on megatron-core, on CPUs too."""
