"""``python -m benchmarks COMMAND``: speed, fidelity and overhead of tellin beside its peers."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks import (
    boundary,
    ceilings,
    compare,
    diff,
    fidelity,
    overhead,
    prefix_cache,
    rounding,
    scheduler_cost,
    speculation,
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    compare.add_arguments(
        commands.add_parser("compare", help="tellin beside the engines that are installed")
    )
    fidelity.add_arguments(
        commands.add_parser("fidelity", help="distance of each engine from the float32 model")
    )
    rounding.add_arguments(
        commands.add_parser("rounding", help="fidelity of schemes of 8-bit activations")
    )
    overhead.add_arguments(
        commands.add_parser("overhead", help="what the engine costs beside the native calls")
    )
    boundary.add_arguments(
        commands.add_parser("boundary", help="what a core in a process of its own costs")
    )
    one = commands.add_parser("ceilings", help="what this machine could do at best")
    one.add_argument("--cache", type=Path, help="where to build (default: TELLIN_HOME/bench)")
    one.add_argument("--threads", type=int)
    speculation.add_arguments(
        commands.add_parser("speculation", help="gain and cost of speculative decoding")
    )
    prefix_cache.add_arguments(
        commands.add_parser("prefix", help="time to the first token with a cached prefix")
    )
    commands.add_parser("scheduler", help="cost per step as requests grow in number")
    two = commands.add_parser("diff", help="two result files of compare, case by case")
    two.add_argument("before", type=Path)
    two.add_argument("after", type=Path)
    args = parser.parse_args()
    if args.command == "compare":
        return compare.run(args)
    if args.command == "fidelity":
        return fidelity.run(args)
    if args.command == "rounding":
        return rounding.run(args)
    if args.command == "overhead":
        return overhead.run(args)
    if args.command == "boundary":
        return boundary.run(args)
    if args.command == "prefix":
        return prefix_cache.run(args)
    if args.command == "speculation":
        return speculation.run(args)
    if args.command == "scheduler":
        print(scheduler_cost.run())
        return 0
    if args.command == "diff":
        print(diff.table(args.before, args.after))
        return 0
    print(json.dumps(ceilings.measure(args.cache or compare.default_cache(), args.threads)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
