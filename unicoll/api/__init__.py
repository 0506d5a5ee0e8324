"""The public functions, with torch.distributed's names and meaning.

Each finds its group and calls a method of it; what a call does is not decided here. Start with
``collectives.py`` and ``init.py``; ``world.py`` has the default group of this process.
"""
