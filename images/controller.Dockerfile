# The controller, the preparation of data, and `cosmos-launch autoscale`. No torch.
#
#     docker build -f images/controller.Dockerfile -t registry.example.com/cosmos-controller:0.1.0 .
#
# Build arguments PIP_INDEX_URL and PIP_EXTRA_INDEX_URL name other indexes of packages.
FROM debian:bookworm-slim AS build
ARG PIP_INDEX_URL PIP_EXTRA_INDEX_URL
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
COPY . /src
RUN python3 -m venv /opt/cosmos \
    && /opt/cosmos/bin/pip install --no-cache-dir "/src[data]"

FROM debian:bookworm-slim
LABEL org.opencontainers.image.title="cosmos-launch controller" org.opencontainers.image.licenses="Apache-2.0"
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates python3 \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/cosmos /opt/cosmos
ENV PATH=/opt/cosmos/bin:/usr/bin:/bin PYTHONUNBUFFERED=1
USER 1000:1000
CMD ["cosmos-launch", "--help"]
