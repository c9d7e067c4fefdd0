"""Has ranks tell each other numbers that are no parameters: what they know, and whether they agree.

The engine enters nowhere. Features and checks do, by `rank_facts.py` (a number from each rank) and `compare_ranks.py`
(an observer that compares them).
"""
