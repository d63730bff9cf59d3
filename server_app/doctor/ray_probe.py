"""A script that starts a local Ray as the server stage does, or joins a cluster, and prints its resources as JSON."""

from __future__ import annotations

import json
import sys

from strategies.compute.ray_actors import RayActors
from strategies.core.errors import ComputeError


def main() -> None:
    """Print one line: the version, the number of machines and the resources, or the error."""
    try:
        with RayActors().session(lambda: None) as session:
            ray = session.ray
            facts = {"version": ray.__version__, "nodes": len(ray.nodes()), "resources": ray.cluster_resources()}
    except ComputeError as error:
        facts = {"error": str(error)}
    sys.stdout.write(json.dumps(facts) + "\n")


if __name__ == "__main__":
    main()
