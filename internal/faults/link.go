package faults

import (
	"context"
	"fmt"
	"strings"
	"time"

	toxiproxy "github.com/Shopify/toxiproxy/v2"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"
)

// Link is a bad network in front of a server: Toxiproxy, in this process.
type Link struct {
	proxy *toxiproxy.Proxy
	names []string
}

// StartLink starts a network that is good until it is told otherwise, to a
// server at host:port.
func StartLink(upstream string) (*Link, error) {
	// One of its parts makes a logger of its own, and nobody else has any.
	zerolog.SetGlobalLevel(zerolog.Disabled)
	quiet := zerolog.Nop()
	server := toxiproxy.NewServer(toxiproxy.NewMetricsContainer(prometheus.NewRegistry()), quiet)
	proxy := toxiproxy.NewProxy(server, upstream, "127.0.0.1:0", upstream)
	if err := proxy.Start(); err != nil {
		return nil, fmt.Errorf("start a network to %s: %w", upstream, err)
	}
	return &Link{proxy: proxy}, nil
}

// Addr is where clients connect.
func (l *Link) Addr() string { return l.proxy.Listen }

// Latency delays what the server says, by a time and up to jitter more or less.
func (l *Link) Latency(by, jitter time.Duration) error {
	return l.add("latency", fmt.Sprintf(`"latency":%d,"jitter":%d`, by.Milliseconds(), jitter.Milliseconds()), "downstream")
}

// Bandwidth lets so many kilobytes a second through, in each direction.
func (l *Link) Bandwidth(kilobytes int) error {
	rate := fmt.Sprintf(`"rate":%d`, kilobytes)
	if err := l.add("bandwidth", rate, "downstream"); err != nil {
		return err
	}
	return l.add("bandwidth", rate, "upstream")
}

// Reset resets every connection at the next thing that the server says.
func (l *Link) Reset() error { return l.add("reset_peer", `"timeout":0`, "downstream") }

// CutAfter ends every connection, those that are open and those to come, after
// the server has said so many bytes more, in the middle of whatever it says.
func (l *Link) CutAfter(bytes int) error {
	return l.add("limit_data", fmt.Sprintf(`"bytes":%d`, bytes), "downstream")
}

func (l *Link) add(kind, attributes, stream string) error {
	name := kind + "_" + stream
	text := fmt.Sprintf(`{"name":%q,"type":%q,"stream":%q,"attributes":{%s}}`, name, kind, stream, attributes)
	if _, err := l.proxy.Toxics.AddToxicJson(strings.NewReader(text)); err != nil {
		return fmt.Errorf("make a network bad (%s): %w", name, err)
	}
	l.names = append(l.names, name)
	return nil
}

// Heal makes the network good again.
func (l *Link) Heal(ctx context.Context) error {
	for _, name := range l.names {
		if err := l.proxy.Toxics.RemoveToxic(ctx, name); err != nil {
			return fmt.Errorf("make a network good again (%s): %w", name, err)
		}
	}
	l.names = nil
	return nil
}

// Close ends the network and every connection.
func (l *Link) Close() { l.proxy.Stop() }
