package faults

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/twmb/franz-go/pkg/kmsg"
)

// swallowed is the partition whose records do not get through.
type swallowed struct {
	topic     string
	partition int32
	requests  int
}

// Swallow loses what is written to one partition until Release: requests with
// records for it are not passed on, and nobody hears of it. What is written to
// the others gets through. Topics have to be named, and not by their ids.
func (p *KafkaProxy) Swallow(topic string, partition int32) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	p.swallow = &swallowed{topic: topic, partition: partition}
}

// Release ends Swallow. What was swallowed stays lost.
func (p *KafkaProxy) Release() {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	p.swallow = nil
}

// Swallowed is how many requests have been swallowed since Swallow.
func (p *KafkaProxy) Swallowed() int {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	if p.swallow == nil {
		return 0
	}
	return p.swallow.requests
}

// swallows reports whether a request is not to be passed on.
func (p *KafkaProxy) swallows(frame []byte) (bool, error) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	if p.swallow == nil || kmsg.Key(binary.BigEndian.Uint16(frame[4:])) != kmsg.Produce {
		return false, nil
	}
	request := kmsg.NewPtrProduceRequest()
	request.SetVersion(int16(binary.BigEndian.Uint16(frame[6:])))
	body, err := behindHead(frame, request.IsFlexible())
	if err == nil {
		err = request.ReadFrom(body)
	}
	if err != nil {
		return false, fmt.Errorf("read a request to write: %w", err)
	}
	for _, topic := range request.Topics {
		for _, partition := range topic.Partitions {
			if topic.Topic == p.swallow.topic && partition.Partition == p.swallow.partition {
				p.swallow.requests++
				return true, nil
			}
		}
	}
	return false, nil
}

// behindHead is a request without its length, kind, version, id, client and tags.
func behindHead(frame []byte, flexible bool) ([]byte, error) {
	at := 14
	if len(frame) < at {
		return nil, errors.New("a request without a head")
	}
	if length := int16(binary.BigEndian.Uint16(frame[12:])); length > 0 {
		at += int(length)
	}
	if flexible {
		at++
	}
	if len(frame) < at || flexible && frame[at-1] != 0 {
		return nil, errors.New("a request with a head that is cut short or has tags")
	}
	return frame[at:], nil
}
