"""Configurations that Hydra composes: its command-line words, its lists of defaults, and the result as one table.

    words      `key=value`, `+key=value`, `++key=value`, `~key`: one word as an `Override`
    defaults   which files a list of defaults names, in which order, below which package
    compose    these files merged, the words applied: the table that the job of the other system sees

Hydra itself is not used: its pinned parser changes what math-verify reads (a reward), as both use ANTLR. The tests
compare this package with Hydra in an environment of its own.
"""
