#!/usr/bin/env bash
# How near students of several sizes come to their teacher after so many tokens of its own chats, in one command:
#
#   scripts/bench/curve.sh TEACHER CHATS FOLDER [TEXT...]      # CHATS: JSONL, such as `llmdistill write` makes
#
# The first 64 chats are held out. The students start from 352 others, and each number of tokens is a training of its own,
# with one cosine. TOKENS and SIZES choose others than below. The table is FOLDER/results.jsonl, the figure curve.png; the
# same command goes on where it was stopped. On a GPU the whole takes some 17 million tokens.
source "$(dirname "${BASH_SOURCE[0]}")/../setup.sh"
teacher=$1 chats=$2 folder=$3
shift 3
mkdir -p "$folder/starts"
head -n 64 "$chats" > "$folder/held_out.jsonl"
tail -n +65 "$chats" > "$folder/train.jsonl"
limits=(--data.max_prompt_length 256 --data.max_length 512 --data.long_prompts drop)
declare -A rates=([90]=3e-5 [80]=3e-5 [70]=1e-4 [60]=1e-4) # the nearer the start, the lower
arms=""
for size in ${SIZES:-90 80 70 60}; do
    start=$folder/starts/$size
    [ -f "$start/config.json" ] || llmdistill compress --model "$teacher" --target_params "$size%" --output "$start" \
        --calibration.data "$folder/train.jsonl" --calibration.examples "${EXAMPLES:-352}" --calibration.held_out 16 \
        --calibration.micro_batch_size "${MICRO_BATCH:-2}" --calibration.folder "$folder/statistics" "${limits[@]}"
    for tokens in ${TOKENS:-0 49152 196608 786432 3145728}; do
        trained="\"$folder/trained/$size-$tokens\""
        [ "$tokens" -gt 0 ] || trained=null
        arms+="{\"name\": \"$size %\", \"student\": \"$start\", \"train\": \"$folder/train.jsonl\", \"tokens\": [$tokens],"
        arms+=" \"settings\": {\"kd.ratio\": 1}, \"learning_rate\": ${rates[$size]:-5e-5}, \"output\": $trained}"$'\n'
    done
done
printf '%s' "$arms" > "$folder/arms.jsonl"
exec python "$(dirname "${BASH_SOURCE[0]}")/bench_tokens.py" --teacher "$teacher" --valid "$folder/held_out.jsonl" --rows 64 \
    "${@/#/--text=}" --window "${WINDOW:-1024}" --windows 8 --arms "$folder/arms.jsonl" --output "$folder/results.jsonl" --figure "$folder/curve.png"
