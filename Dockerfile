# One image with all three programs: `api` (the default), `worker` and `onceledger`.
#
# The Kafka client is C, so both stages are Debian of the same release.
FROM golang:1.26-bookworm AS build
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY . .
RUN CGO_ENABLED=1 go build -trimpath -buildvcs=false -ldflags "-s -w" -o /out/ ./cmd/api ./cmd/worker ./cmd/onceledger

FROM debian:bookworm-slim
# /keys is where docker-compose.yml keeps the first API key: a new volume gets this owner.
RUN install -d -o 65532 -g 65532 -m 0700 /keys
COPY --from=build /out/ /usr/local/bin/
USER 65532:65532
EXPOSE 8080 8081
CMD ["api"]
