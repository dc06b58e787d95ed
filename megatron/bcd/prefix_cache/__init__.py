"""Pre-inference (arXiv 2506.12037, section 3.2.2): the input of the first active layer, cached on disk by sample.

`controller` decides per phase, fills the cache and reads from it; `store` is the file.
"""
