# docker build -t offbook .
# docker run --gpus all -p 8000:8000 -v offbook:/data -e MODEL=Qwen/Qwen2.5-7B-Instruct -e API_KEY=... offbook
#
# Without a GPU, the embedded engine and the CPU build of torch:
# docker build -t offbook --build-arg EXTRAS=server --build-arg PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu .
FROM python:3.11-slim

# Triton compiles launchers with gcc at run time; tini ends the engines' processes with the container.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev tini \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 offbook \
    && install -d -o offbook -g offbook /data

ARG EXTRAS=gpu
ARG PIP_EXTRA_INDEX_URL
COPY . /src
RUN pip install --no-cache-dir "/src[${EXTRAS}]" && rm -rf /src

USER 1000
WORKDIR /data
ENV MODEL=tiny OFFBOOK_DIR=/data HF_HOME=/data/huggingface
VOLUME /data
EXPOSE 8000
HEALTHCHECK --start-period=15m CMD ["python", "-c", "import json, sys, urllib.request as r; sys.exit(json.load(r.urlopen('http://127.0.0.1:8000/health'))['status'] == 'failed')"]
ENTRYPOINT ["tini", "--"]
# Without API_KEY the server makes a key, keeps it in /data/key and shows it once in its log.
CMD ["sh", "-c", "export OFFBOOK_API_KEY=\"${API_KEY:-$OFFBOOK_API_KEY}\"; exec offbook serve --model \"$MODEL\" --host 0.0.0.0 --port 8000"]
