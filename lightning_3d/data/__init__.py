"""Text to tokens on disk, and tokens to batches: plain numpy and torch, with no word of Lightning or of processes.

`prepare` writes Nanosets (shards.py knows the bytes), `Nanoset` reads windows from them, `sample_ids` gives the order, and
`Batches` joins the last two into the batch of one data-parallel coord.
"""
