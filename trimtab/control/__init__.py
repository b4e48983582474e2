# SPDX-License-Identifier: Apache-2.0
"""The controller: who runs high in the next step, and why.

values.py      what travels down the pipe: Reading, Risk, Plan, Event
policy.py      thresholds, budget, lock; presets; calibration
judge.py       Algorithm 1: each unit against its own history
detectors.py   other ways to judge, by name; columns.py, zscore.py, sources.py, estimates.py hold them, surprise.py and
               measures.py what they share
sensors.py     who measures what they need; listeners.py, gaps.py more of them, sensing.py all by name
decide.py      Algorithm 2: selection, budget, lock
advance.py     both over a stretch of steps: the whole method as one pure function
replay.py      the same over a recorded trace
tally.py       metrics in bounded memory
units.py       what is watched and what can be switched; all that `linear` knows of this room
observe.py     gradients to norms, one copy
act.py         the only place that flips a switch
controller.py  the one call in somebody's loop
events.py      decisions as lines for people
selections.py  other ways to fill the seats, to compare with
state.py       what a checkpoint holds
record.py      the run folder; writers.py its files
"""
