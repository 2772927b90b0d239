"""The shares of a plan's bytes by process, on one node and on nodes of eight.

python -m benchmarks.shares SOURCE FORMAT NUMBER
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Sequence

import ckpt
from benchmarks.runner import verdict
from ckpt.base.text import pluralize
from ckpt.move.file_pieces import deal, max_pieces, pieces_of

PER_NODE, GOAL = 8, 0.05


def main(source: str, to: str, number: int) -> str:
    ranks = {"world_size": number} if to != "hf" else {}
    files = ckpt.plan(source, to, **ranks).plan.target.files
    pieces = {file.name: pieces_of(file, max_pieces(len(files))) for file in files}
    todo = {name: {*inside} for name, inside in pieces.items()}

    def most(nodes: Sequence[Hashable]) -> float:
        """Return the largest share, relative to the mean."""
        sizes = [
            sum(stop - start for part in share for start, stop in part.ranges)
            for share in (deal(files, pieces, todo, nodes, rank) for rank in range(number))
        ]
        return max(sizes) * number / sum(sizes) - 1

    one, several = most([0] * number), most([rank // PER_NODE for rank in range(number)])
    told = f"on one node, Lustre or GPFS by {one:.1%}, on NFS and nodes of {PER_NODE} by {several:.1%}"
    if several > GOAL:
        told += f" (at least {_least([file.size for file in files], -(-number // PER_NODE)):.1%} with whole files)"
    reached = verdict(max(one, several) <= GOAL, f"<= {GOAL:.0%}")
    return f"{to}: the largest share of {pluralize(number, 'process')} is above the mean {told} {reached}"


def _least(sizes: Sequence[int], num_nodes: int) -> float:
    """Return a lower bound for the largest node's excess: of k * n + 1 files, one of n nodes gets k + 1."""
    falling = sorted(sizes, reverse=True)
    loads = [sum(falling[k * (num_nodes - 1) : k * num_nodes + 1]) for k in range(-(-len(sizes) // num_nodes))]
    return max(loads) * num_nodes / sum(sizes) - 1


if __name__ == "__main__":
    print(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
