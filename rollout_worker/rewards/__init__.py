"""Rewards: what an answer is worth, computed in processes of their own with a deadline per sample.

functions   the built-in functions, and how answers are found and compared
registry    names to functions, a user's file too   scoring    rewards to one score, the overlong penalty
process     the program that runs the functions     protocol   the messages between it and the pool
pool        processes, deadlines, replacements
"""
