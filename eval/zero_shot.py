"""Zero-shot tasks of lm-evaluation-harness: teacher, untrained student and student of a run side by side.

python eval/zero_shot.py --model runs/quickstart --tasks arc_easy,hellaswag,piqa
python eval/zero_shot.py --model DIR,DIR --tasks arc_challenge --num_fewshot 25 [--task_dir DIR] [--json]
"""

from __future__ import annotations

import sys

from llmdistill.commands.side_by_side import main

if __name__ == "__main__":
    sys.exit(main("zero_shot", prog="eval/zero_shot.py"))
