"""What a pod runs before it stops: wait until no request of its cluster runs or waits, or the limit is reached.

    python wait_until_idle.py --limit-s 300 [--url http://host:8000]

Kubernetes sends nothing new to a pod that is to stop, and stops its processes when this ends. Requests enter at the
head: a worker asks there, at the address that the operator leaves in FQ_RAY_IP. Needs nothing but Python.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Sequence

IDLE_S = 3.0
"""Between two turns of a conversation, or before a request in flight is counted, a server looks idle for a moment."""
SILENT_S = 60.0
"""Without an answer for so long there is no head to answer, or no application on it: nobody is left to wait for."""
ASK_TIMEOUT_S = 5.0
NOBODY_THERE = {404, 502, 503, 504}
"""What a proxy answers that has no application behind it."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Wait as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit-s", type=float, required=True, help="the longest wait, seconds")
    parser.add_argument("--url", default=head_url(), help="where requests enter; the head of this cluster, port 8000")
    asked = parser.parse_args(arguments)
    wait_until_idle(asked.url, os.environ.get("RAYSERVE_MOE_API_KEY", ""), limit_s=asked.limit_s)


def head_url() -> str:
    """Return the head of this cluster; on the head itself the operator leaves no address."""
    return f"http://{os.environ.get('FQ_RAY_IP', '127.0.0.1')}:8000"


def wait_until_idle(
    url: str, api_key: str, *, limit_s: float, idle_s: float = IDLE_S, silent_s: float = SILENT_S
) -> None:
    """Return once the server is idle for `idle_s`, or silent for `silent_s`, at the latest after `limit_s`."""
    start = busy_at = heard_at = time.monotonic()
    while (now := time.monotonic()) - start < limit_s:
        num_requests = requests_in(url, api_key)
        if num_requests is not None:
            heard_at = now
        if num_requests != 0:
            busy_at = now
        if now - busy_at >= idle_s or now - heard_at >= silent_s:
            return
        time.sleep(min(0.5, idle_s / 3))


def requests_in(url: str, api_key: str) -> int | None:
    """Return the number of requests that run or wait; None if nobody answers for the application.

    An answer without a number, such as a refused key, counts as a request: better to wait than to cut one short.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    request = urllib.request.Request(f"{url}/v1/loads", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=ASK_TIMEOUT_S) as answer:
            loads = json.load(answer)
        return loads["num_running_reqs"] + loads["num_waiting_reqs"]
    except urllib.error.HTTPError as error:
        error.close()
        return None if error.code in NOBODY_THERE else 1
    except (OSError, http.client.HTTPException):
        return None
    except (ValueError, KeyError, TypeError):
        return 1


if __name__ == "__main__":
    main()
