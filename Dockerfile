# Three images, selected with --target:
#
#   vllm      vLLM with KVStow. Installs nothing else: vLLM has everything that KVStow imports.
#   service   the node service, `kvstow serve`, and its keeper, `kvstow keeper`. It needs no GPU, no torch and no CUDA.
#   cli       the command line only, without numpy and web server: for jobs and `helm test`.
#
# docker build --target service --build-arg REVISION="$(git rev-parse HEAD)" --tag kvstow:0.1.0 .
# docker run --read-only --tmpfs /tmp --volume "$PWD/token:/token:ro" --publish 127.0.0.1:9595:9595 kvstow:0.1.0 \
#     serve --memory 64GiB --host 0.0.0.0 --token-file /token
#
# TIERS names the fleet's stores (docs/tier.md) whose clients the image service contains. Mooncake's takes 160 MB, more than
# all else that the service needs, so it is there on request:
#
# docker build --target service --build-arg TIERS=mooncake --tag kvstow:0.1.0-mooncake .
#
# locks/image-*.txt pin all packages from the package index, with their hashes; `make locks` updates them.
# Tags can move, digests cannot: `python -m publish.bases` asks the registries for the digests of today and writes them
# here, and `make release` refuses a tag whose bases have none.
ARG PYTHON_IMAGE=docker.io/library/python:3.12-slim-bookworm
ARG VLLM_IMAGE=docker.io/vllm/vllm-openai:v0.33.0
ARG TIERS=""


FROM ${PYTHON_IMAGE} AS wheel
WORKDIR /src
COPY locks/image-build.txt ./
RUN python3 -m venv /build \
    && /build/bin/pip install --no-cache-dir --no-deps --require-hashes --requirement image-build.txt
COPY pyproject.toml README.md LICENSE ./
COPY engine engine
COPY api api
COPY service service
RUN /build/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels .


FROM ${PYTHON_IMAGE} AS cli-environment
COPY locks/image-cli.txt /
RUN python3 -m venv /opt/kvstow \
    && /opt/kvstow/bin/pip install --no-cache-dir --no-deps --require-hashes --requirement /image-cli.txt
COPY --from=wheel /wheels /wheels
RUN /opt/kvstow/bin/pip install --no-cache-dir --no-deps /wheels/*.whl \
    && /opt/kvstow/bin/pip uninstall --yes pip setuptools


FROM ${PYTHON_IMAGE} AS service-environment
ARG TIERS
COPY locks/image-service.txt locks/image-mooncake.txt /
RUN python3 -m venv /opt/kvstow \
    && for image in service ${TIERS}; do \
        /opt/kvstow/bin/pip install --no-cache-dir --no-deps --require-hashes --requirement "/image-${image}.txt" || exit 1; \
    done
COPY --from=wheel /wheels /wheels
RUN /opt/kvstow/bin/pip install --no-cache-dir --no-deps /wheels/*.whl \
    && /opt/kvstow/bin/pip check \
    && /opt/kvstow/bin/pip uninstall --yes pip


FROM ${PYTHON_IMAGE} AS python
ARG PYTHON_IMAGE
ARG REVISION=unknown
ARG VERSION=0.1.0
LABEL org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.base.name="${PYTHON_IMAGE}"
# Kubernetes can verify only a numeric user as non-root. Group 0 has the user's write access, for platforms that assign a
# user.
RUN groupadd --gid 65532 kvstow \
    && useradd --uid 65532 --gid 65532 --create-home kvstow \
    && chgrp 0 /home/kvstow \
    && chmod 2775 /home/kvstow
ENV PATH=/opt/kvstow/bin:$PATH \
    HOME=/home/kvstow \
    USER=kvstow \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
WORKDIR /home/kvstow
STOPSIGNAL SIGTERM


FROM python AS cli
LABEL org.opencontainers.image.title="kvstow-cli" \
      org.opencontainers.image.description="Command line of KVStow"
COPY --from=cli-environment /opt/kvstow /opt/kvstow
USER 65532:65532
HEALTHCHECK NONE
ENTRYPOINT ["kvstow"]
CMD ["--help"]


FROM python AS service
ARG TIERS
# Mooncake's library loads the first three, which its wheel does not bring. The last one knows the network cards, for RDMA.
# hadolint ignore=DL3008
RUN case " ${TIERS} " in *" mooncake "*) \
        apt-get update \
        && apt-get install -y --no-install-recommends libcurl4 libibverbs1 libnuma1 ibverbs-providers \
        && rm -rf /var/lib/apt/lists/* ;; \
    esac
LABEL org.opencontainers.image.title="kvstow" \
      org.opencontainers.image.description="Node service of KVStow, with admin API and command line"
COPY --from=service-environment /opt/kvstow /opt/kvstow
USER 65532:65532
EXPOSE 9595
# For Docker; Kubernetes uses probes. With TLS or another port use docker run --health-cmd, or --no-healthcheck.
HEALTHCHECK --interval=10s --timeout=3s --start-period=15s CMD \
    ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:9595/livez', timeout=2)"]
ENTRYPOINT ["kvstow"]
CMD ["serve"]


FROM ${VLLM_IMAGE} AS vllm
ARG VLLM_IMAGE
ARG REVISION=unknown
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="kvstow-vllm" \
      org.opencontainers.image.description="vLLM with KVStow" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.base.name="${VLLM_IMAGE}"
COPY --from=wheel /wheels /kvstow/
# Without dependencies: what vLLM has installed stays as it is. uv compiles nothing, and the user below cannot keep what each
# process of vLLM would compile then, for 0.2 s of its start.
RUN uv pip install --system --no-cache --no-deps /kvstow/*.whl \
    && python3 -c "import sys; from compileall import compile_dir; from importlib.util import find_spec; \
        names = ('kvstow', 'kvstow_api', 'kvstow_service'); \
        sys.exit(not all(compile_dir(find_spec(name).submodule_search_locations[0], quiet=1) for name in names))" \
    && rm -r /kvstow \
    && mkdir --mode 2775 /home/kvstow \
    && chown 65532:0 /home/kvstow
# Non-root: vLLM downloads and compiles into a folder that this user can write.
ENV HOME=/home/kvstow \
    USER=kvstow
WORKDIR /home/kvstow
USER 65532:65532
EXPOSE 8000 9595
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=30s --timeout=5s --start-period=30m CMD \
    ["python3", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["vllm", "serve"]
