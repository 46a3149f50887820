# syntax=docker/dockerfile:1
# SPDX-License-Identifier: Apache-2.0
# Images of vllm-ascend-pd, by target: cpu, a2 (Atlas A2, 910B), a3 (Atlas A3). docs/containers.md says how to build and
# run them, and what of this file has been executed. Every step is a script in docker/; BuildKit is needed.

ARG CPU_BASE=debian:bookworm-slim
ARG A2_BASE=quay.io/ascend/cann:9.1.0-910b-ubuntu22.04-py3.12
ARG A3_BASE=quay.io/ascend/cann:9.1.0-a3-ubuntu22.04-py3.12

# ------------------------------------------------------------------------------------------------- the wheels
FROM debian:bookworm-slim AS source
RUN --mount=type=bind,source=docker/packages.sh,target=/docker/packages.sh /docker/packages.sh wheel
WORKDIR /src
COPY . .

FROM source AS wheel-cpu
ARG CPU_LANE=cpu
ENV VLLM_PD_CACHE=/cache
RUN --mount=type=cache,target=/cache /src/docker/wheel.sh "$CPU_LANE" /dist

FROM source AS wheel-ascend
ARG ASCEND_LANE=ascend
ENV VLLM_PD_CACHE=/cache
RUN --mount=type=cache,target=/cache /src/docker/wheel.sh "$ASCEND_LANE" /dist ascend

# ------------------------------------------------------------------------------------------------- cpu
FROM ${CPU_BASE} AS cpu
RUN --mount=type=bind,source=docker/packages.sh,target=/docker/packages.sh /docker/packages.sh cpu
ARG PD_UID=1000
RUN --mount=type=bind,source=docker/user.sh,target=/docker/user.sh /docker/user.sh "$PD_UID"
ARG PYTORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN --mount=type=bind,source=docker/requirements.sh,target=/docker/requirements.sh \
    --mount=type=bind,from=wheel-cpu,source=/dist/needs,target=/needs \
    /docker/requirements.sh /needs
RUN --mount=type=bind,source=docker/install.sh,target=/docker/install.sh \
    --mount=type=bind,from=wheel-cpu,source=/dist,target=/dist \
    /docker/install.sh /dist
RUN --mount=type=bind,source=docker,target=/docker /docker/finish.sh cpu
ARG CPU_BASE
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="vllm-ascend-pd" \
      org.opencontainers.image.description="vLLM with prefill/decode disaggregation, CPU" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="${CPU_BASE}"
ENV HOME=/home/vllm USER=vllm LOGNAME=vllm PYTHONUNBUFFERED=1
WORKDIR /home/vllm
USER ${PD_UID}:0
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=15m --retries=3 CMD ["healthcheck"]
ENTRYPOINT ["vllm"]
CMD ["--help"]

# ------------------------------------------------------------------------------------------------- a2
FROM ${A2_BASE} AS a2
RUN --mount=type=bind,source=docker/packages.sh,target=/docker/packages.sh /docker/packages.sh ascend
ARG PD_UID=1000
RUN --mount=type=bind,source=docker/user.sh,target=/docker/user.sh /docker/user.sh "$PD_UID"
ARG PYTORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG ASCEND_INDEX=https://mirrors.huaweicloud.com/ascend/repos/pypi
RUN --mount=type=bind,source=docker/requirements.sh,target=/docker/requirements.sh \
    --mount=type=bind,from=wheel-ascend,source=/dist/needs,target=/needs \
    /docker/requirements.sh /needs
RUN --mount=type=bind,source=docker/install.sh,target=/docker/install.sh \
    --mount=type=bind,from=wheel-ascend,source=/dist,target=/dist \
    /docker/install.sh /dist
ARG VLLM_ASCEND_VERSION=0.23.0.post1
ARG TRITON_ASCEND_VERSION=3.2.2
RUN --mount=type=bind,source=docker/install-ascend.sh,target=/docker/install-ascend.sh /docker/install-ascend.sh ascend910b1
ENV HOME=/home/vllm USER=vllm LOGNAME=vllm PYTHONUNBUFFERED=1 TASK_QUEUE_ENABLE=1 OMP_NUM_THREADS=1
RUN --mount=type=bind,source=docker,target=/docker /docker/finish.sh ascend
ARG A2_BASE
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="vllm-ascend-pd" \
      org.opencontainers.image.description="vLLM with prefill/decode disaggregation, Atlas A2" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="${A2_BASE}"
WORKDIR /home/vllm
USER ${PD_UID}:0
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m --retries=3 CMD ["healthcheck"]
ENTRYPOINT ["vllm"]
CMD ["--help"]

# ------------------------------------------------------------------------------------------------- a3
FROM ${A3_BASE} AS a3
RUN --mount=type=bind,source=docker/packages.sh,target=/docker/packages.sh /docker/packages.sh ascend
ARG PD_UID=1000
RUN --mount=type=bind,source=docker/user.sh,target=/docker/user.sh /docker/user.sh "$PD_UID"
ARG PYTORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG ASCEND_INDEX=https://mirrors.huaweicloud.com/ascend/repos/pypi
RUN --mount=type=bind,source=docker/requirements.sh,target=/docker/requirements.sh \
    --mount=type=bind,from=wheel-ascend,source=/dist/needs,target=/needs \
    /docker/requirements.sh /needs
RUN --mount=type=bind,source=docker/install.sh,target=/docker/install.sh \
    --mount=type=bind,from=wheel-ascend,source=/dist,target=/dist \
    /docker/install.sh /dist
ARG VLLM_ASCEND_VERSION=0.23.0.post1
ARG TRITON_ASCEND_VERSION=3.2.2
RUN --mount=type=bind,source=docker/install-ascend.sh,target=/docker/install-ascend.sh /docker/install-ascend.sh ascend910_9391
ENV HOME=/home/vllm USER=vllm LOGNAME=vllm PYTHONUNBUFFERED=1 TASK_QUEUE_ENABLE=1 OMP_NUM_THREADS=1
RUN --mount=type=bind,source=docker,target=/docker /docker/finish.sh ascend
ARG A3_BASE
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="vllm-ascend-pd" \
      org.opencontainers.image.description="vLLM with prefill/decode disaggregation, Atlas A3" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="${A3_BASE}"
WORKDIR /home/vllm
USER ${PD_UID}:0
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m --retries=3 CMD ["healthcheck"]
ENTRYPOINT ["vllm"]
CMD ["--help"]
