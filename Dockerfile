# Images of duetts: `docker build --target cpu -t duetts:cpu .`, or `--target cuda`. For Ray and object stores add
# `--build-arg EXTRAS=ray,s3`; docs/cluster.md has more.
#
# A container may run as any user. Models and what can be made again are kept in /cache, stored voices in /voices: mount both to
# keep them. duetts-mini needs nothing but the package, so nothing is fetched at the start unless another model is named.
ARG PYTHON=3.12

# -- what both targets are built of --------------------------------------------------------------------------------------
FROM python:${PYTHON}-slim-bookworm AS source
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /source
COPY constraints.txt ./

FROM source AS built-cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN python -m pip install --index-url "${TORCH_INDEX}" -c constraints.txt torch
ARG EXTRAS=""
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN python -m pip install -c constraints.txt ".[${EXTRAS}]"

# torch of the usual index brings CUDA's libraries and Triton with it; the driver is the host's.
FROM source AS built-cuda
RUN python -m pip install -c constraints.txt torch
ARG EXTRAS=""
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN python -m pip install -c constraints.txt ".[${EXTRAS}]"

# -- what both targets run on --------------------------------------------------------------------------------------------
FROM python:${PYTHON}-slim-bookworm AS runtime
# gcc: Triton compiles the launchers of its kernels where they run. wget: KubeRay's probes call it.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends gcc libc6-dev wget \
 && rm -rf /var/lib/apt/lists/* \
 && install -d -m 1777 /cache /voices /home/duetts
# A user whom the machine does not know has no name and no home but these.
ENV HOME=/home/duetts USER=duetts LOGNAME=duetts \
    DUETTS_CACHE_DIR=/cache/duetts DUETTS_VOICES_DIR=/voices HF_HOME=/cache/huggingface TRITON_CACHE_DIR=/cache/triton \
    RAY_USAGE_STATS_ENABLED=0 PYTHONUNBUFFERED=1
WORKDIR /home/duetts
VOLUME ["/cache", "/voices"]
EXPOSE 8000
# 200 when a model is there, an engine is up and open work makes progress. A large model may load for minutes.
HEALTHCHECK --interval=10s --timeout=6s --start-period=600s --retries=3 \
  CMD ["python", "-c", "import os, urllib.request as web; web.urlopen('http://127.0.0.1:' + os.environ.get('DUETTS_PORT', '8000') + '/health', timeout=5)"]
# Nobody in particular, of group 0, as OpenShift has it.
USER 10001:0
ENTRYPOINT ["duetts"]
CMD ["serve", "--host", "0.0.0.0"]

FROM runtime AS cpu
COPY --from=built-cpu /usr/local /usr/local

FROM runtime AS cuda
COPY --from=built-cuda /usr/local /usr/local
