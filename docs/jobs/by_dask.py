"""Started by ``python by_dask.py PATH STEPS RANKS``, here on a cluster of this machine."""

import sys
from urllib.parse import urlparse

from distributed import Client, LocalCluster
from member import meeting_point, member

if __name__ == "__main__":
    path, steps, ranks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    with (
        LocalCluster(ranks, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        client.wait_for_workers(ranks)
        workers = [*client.scheduler_info(n_workers=-1)["workers"]]
        host = urlparse(workers[0]).hostname
        address = client.submit(meeting_point, host, workers=workers[:1], pure=False).result()
        done = [
            client.submit(member, address, k, ranks, path, steps, workers=[worker], pure=False)
            for k, worker in enumerate(workers)
        ]
        print("dask:", client.gather(done))
