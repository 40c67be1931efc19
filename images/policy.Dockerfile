# A policy replica. torch.compile and Triton need a C++ compiler and headers at run time.
#
#     docker build -f images/policy.Dockerfile -t registry.example.com/cosmos-policy:0.1.0 .
#
# Build arguments PIP_INDEX_URL and PIP_EXTRA_INDEX_URL name other indexes of packages;
# EXTRAS further ones of pyproject.toml: policy,8bit,liger.
FROM debian:bookworm-slim AS build
ARG PIP_INDEX_URL PIP_EXTRA_INDEX_URL
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
COPY . /src
ARG EXTRAS=policy
RUN python3 -m venv /opt/cosmos \
    && /opt/cosmos/bin/pip install --no-cache-dir "/src[${EXTRAS}]"

FROM debian:bookworm-slim
LABEL org.opencontainers.image.title="cosmos-launch policy" org.opencontainers.image.licenses="Apache-2.0"
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates g++ python3-dev \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/cosmos /opt/cosmos
ENV PATH=/opt/cosmos/bin:/usr/bin:/bin PYTHONUNBUFFERED=1
USER 1000:1000
CMD ["cosmos-launch", "--help"]
