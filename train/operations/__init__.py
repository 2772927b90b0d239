"""Trainer's work besides training: log, trackers, loss spikes and checkpoint records.

Tools for any trainer are in `ckpt/training`.
"""
