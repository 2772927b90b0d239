"""Running a run: heartbeats and who watches them, the nodes' preflight, spikes, trackers, records of checkpoints.

`heartbeat`, `watch`, `preflight`, `spikes` and `records` know no engine and need no torch; `callback` brings them to
any script of HF Trainer. `beside` is what the bundled trainer's own loop does with all of them.
"""
