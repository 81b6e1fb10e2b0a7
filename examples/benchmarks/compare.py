"""Training step, prefill and decode with and without mixing, measured in turn in one run.

    python examples/benchmarks/compare.py train --batch 1 --lengths 512            # a small model
    python examples/benchmarks/compare.py prefill --shape paper-1.5b --lengths 2048,32768,131072
    python examples/benchmarks/compare.py decode --shape qwen3-0.6b --batches 1,8,64 --mode reduce-overhead
    python examples/benchmarks/compare.py train --backend eager --json train.json

Both variants have the same weights, are compiled in the same way and alternate; given are medians, their
ratio, and the middle half of the ratios of neighbouring measurements. On CUDA also the peak memory.
"""

from __future__ import annotations

import torch
from bench import Comparison, announce, compare, decoder, failed, finish, parser, setting
from scenarios import decode, prefill, training

SCENARIOS = {"train": training, "prefill": prefill, "decode": decode}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("scenario", choices=sorted(SCENARIOS))
    arguments.add_argument("--lengths", default="512", help="tokens; for decode: tokens in the cache")
    arguments.add_argument("--batches", "--batch", default="1")
    given = arguments.parse_args()
    chosen = setting(given)
    lengths = [int(n) for n in given.lengths.split(",")]
    announce(chosen)
    model = decoder(chosen.shape, chosen.device, chosen.dtype, max(lengths) + 8)
    calls_of = SCENARIOS[given.scenario](model, chosen)
    results: list[Comparison] = []
    for batch in map(int, given.batches.split(",")):
        for length in lengths:
            name = f"{given.scenario}, batch {batch}, {length} tokens"
            try:
                result = compare(name, calls_of(batch, length), chosen)
            except torch.OutOfMemoryError as error:
                failed(name, error)
                continue
            results.append(result)
            print(result, flush=True)
    finish(given.json, chosen, results)


if __name__ == "__main__":
    main()
