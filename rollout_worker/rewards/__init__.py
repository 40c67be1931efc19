"""Rewards: what an answer is worth, computed in processes of their own with a deadline per sample.

answers     finding and comparing final answers     functions  the built-in reward functions
registry    names to functions, a user's file too   scoring    rewards to one score, the overlong penalty
process     the program that runs the functions     protocol   what it and the pool say to each other
pool        processes, deadlines, replacements      outages    which failures may pass by themselves
"""
