"""Checks ranks and users: refuses what would train on without an error and give wrong weights.

observers.py lists them, and has their one setting; due.py decides when they are due. arguments.py and plan.py refuse
what fully_shard can't do. headers.py, rollcall.py and named_comm.py compare what ranks are about to communicate;
watch.py tells ranks that wait for one that waits for them elsewhere.
"""
