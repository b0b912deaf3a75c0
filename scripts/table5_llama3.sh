#!/usr/bin/env bash
# MaKD's Table 5 for Llama-3.2-1B on the GPUs of this node (NUM_GPUS, 8 by default): fine-tunes the teacher on Dolly, then trains
# and scores every method. What is finished is kept. Further arguments go to the comparison.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
deepspeed --num_gpus "${NUM_GPUS:-8}" llmdistill/train.py --ds_config ds_configs/zero2.json --recipe llama3_dolly_teacher
exec llmdistill compare --num_gpus "${NUM_GPUS:-8}" --recipe llama3_dolly --suite makd-table5 --learning_rates 5e-5,1e-5,5e-6 "$@"
