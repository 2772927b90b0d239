"""Files of `torch.save` and `pickle.dump`, read and written without executing any of them, and without torch."""
