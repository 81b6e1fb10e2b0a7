"""What mixing costs without a compiler: backend="eager" against the model's own forward, at hidden 512.

    python examples/benchmarks/eager_cost.py --lengths 16,128,512 --threads 1

The mixed model runs as the captured graph, which saves the Python of the model's own forward. So that this
does not hide what mixing costs, the second row of each length compares with the captured graph, not mixed.
"""

from __future__ import annotations

import torch
from bench import announce, compare, decoder, finish, parser, setting, twin
from scenarios import CAUSAL

from depthify import depthify


def main() -> None:
    arguments = parser(__doc__)
    arguments.set_defaults(backend="eager", device="cpu")
    arguments.add_argument("--lengths", default="128")
    given = arguments.parse_args()
    chosen = setting(given)
    lengths = [int(n) for n in given.lengths.split(",")]
    announce(chosen)
    model = decoder(chosen.shape, chosen.device, chosen.dtype, max(lengths)).eval()
    mixed = depthify(twin(model), chosen.stride, budget=float("inf"), dynamic=False)
    captured = torch.compile(twin(model), backend="eager", fullgraph=True, dynamic=False)
    results = []
    for length in lengths:
        ids = chosen.tokens(1, length)

        def forward(model: object, ids: torch.Tensor = ids) -> None:
            with torch.no_grad():
                model(ids, attention_mask=CAUSAL, use_cache=False)

        for name, vanilla in (("as it is", model), ("captured", captured)):
            calls = {"vanilla": lambda one=vanilla: forward(one), "mixed": lambda: forward(mixed)}
            title = f"{length} tokens, vanilla {name}"
            results.append(compare(title, calls, chosen))
            print(results[-1], flush=True)
    finish(given.json, chosen, results)


if __name__ == "__main__":
    main()
