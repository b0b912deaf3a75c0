"""What random numbers are drawn for: the last number in a generator's seed, after what tells one draw from another.

numpy fills a seed up with zeros, so the seeds (seed, epoch) and (seed, epoch, 0) give the same numbers. A last number
that is never 0 keeps the purposes apart. These numbers never change, because every batch depends on them.
"""

STEP_KIND = 1  # by step: whether the student writes the answers itself
SEQUENCE = 1  # by epoch and index, hence apart from STEP_KIND: the masks or segments of a sequence
ANSWER = 2  # by step and row: the answer that the student writes
WINDOW = 3  # by window: the order of its global batches
DOCUMENTS = 4  # which documents of a text are used
STRIDE = 5  # by epoch and text: where the walk through a text of a mixture begins
MIXTURE = 6  # by epoch and file: the order of a file of a mixture
