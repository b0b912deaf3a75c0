"""GLUE: fine-tune a model on each task, choose on dev, report mean and standard deviation over seeds.

python eval/glue.py --model DIR --data_dir glue --tasks rte,cola,sst2 [--protocol minilmv2] [--json]
python eval/glue.py --model DIR --teacher runs/glue/TEACHER --method kd --tasks rte
python eval/glue.py --model DIR --tasks rte --tsne runs/glue/TEACHER,runs/glue/OTHER
deepspeed --num_gpus 2 eval/glue.py --model DIR --data_dir glue
"""

from __future__ import annotations

import sys

from llmdistill.commands.fine_tuning import main

if __name__ == "__main__":
    sys.exit(main(prog="eval/glue.py"))
