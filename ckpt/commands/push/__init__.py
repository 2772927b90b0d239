"""The Hugging Face Hub: folders pushed, models fetched, model cards."""
