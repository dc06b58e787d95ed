"""Pre-inference (arXiv 2506.12037, section 3.2.2): the input of the first active layer, cached on disk by sample.

`key` identifies a cache, `store` holds its entries, `folders` finds, creates and deletes the caches below
--bcd-prefix-cache, `weight_digests` identifies the weights of a prefix, `fill` computes missing entries, `serve` reads
them ahead of the training loop, and `controller` decides per phase.
"""
