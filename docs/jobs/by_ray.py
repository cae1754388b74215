"""Started by ``python by_ray.py PATH STEPS RANKS``, on a cluster of Ray or on this machine."""

import sys

import ray

path, steps, ranks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])


@ray.remote(num_cpus=1)
class Rank:
    """A worker; the actors of Ray are processes, whose machines see one file system."""

    def meeting_point(self):
        from member import meeting_point

        return meeting_point(ray.util.get_node_ip_address())

    def train(self, *arguments):
        from member import member

        return member(*arguments)


ray.init(
    num_cpus=ranks,
    include_dashboard=False,
    runtime_env={"env_vars": {"PYTHONPATH": ":".join(sys.path)}},
)
actors = [Rank.remote() for _ in range(ranks)]
address = ray.get(actors[0].meeting_point.remote())
done = [actor.train.remote(address, k, ranks, path, steps) for k, actor in enumerate(actors)]
print("ray:", ray.get(done))
