#!/usr/bin/env bash
# Sets up what is missing and runs the main job on the embedded default. Further arguments go to the run,
# for example: scripts/quickstart.sh --train.steps 50 --output_dir runs/short
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
exec deepspeed --num_gpus "${NUM_GPUS:-1}" --log_level error llmdistill/train.py \
    --ds_config ds_configs/zero2.json --output_dir runs/quickstart "$@"
