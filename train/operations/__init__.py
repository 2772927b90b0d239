"""Trainer's work besides training: log, trackers, loss spikes and checkpoint records."""
