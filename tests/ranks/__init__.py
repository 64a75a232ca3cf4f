"""Checks that run on real Horovod ranks: one launch runs all checks of a topic, pytest reports each by its name.

A topic is a module ``ranks.check_<topic>`` whose functions ``check_*`` are called on every rank, in the order in which
they are written. By hand: ``mpirun -np 2 python -m ranks.worker usage [check_clipping ...]`` with ``tests`` on
PYTHONPATH.
"""

from ranks.launch import Job, checks_of, job

__all__ = ["Job", "checks_of", "job"]
