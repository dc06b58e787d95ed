"""Pre-inference (arXiv 2506.12037, section 3.2.2): what enters the first active layer, kept on disk by sample.

`key` says which caches are the same, `store` holds the records of one, `folders` those below --bcd-prefix-cache,
`weights` names the weights of a prefix, `reader` hands records to the training loop. When to fill and serve one is
decided in `train`.
"""
