"""The campaign of faults: `python -m tests.faults` damages checkpoints in ten thousand ways and says what came of it.

Every case ends in one of a few ways (`ckpt` may refuse, write what the intact checkpoint gives, or write something else
where nothing on the disk tells that it is wrong); anything else fails the campaign.  `docs/reliability.md` has its
table.
"""
