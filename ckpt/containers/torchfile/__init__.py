"""Files from `torch.save` and `pickle.dump`, read and written without running their code, and without torch."""
