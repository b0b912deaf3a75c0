"""Questions on the facts of the embedded world, in the official format of SQuAD 1.1 and 2.0, in seconds.

python scripts/make/make_questions.py questions
python eval/squad.py --model DIR --data_dir questions --tasks squad1,squad2
"""

from __future__ import annotations

import argparse
from pathlib import Path

from llmdistill.embedded.questions import write_questions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="Folder for squad1/ and squad2/.")
    for file in write_questions(parser.parse_args().folder):
        print(file)


if __name__ == "__main__":
    main()
