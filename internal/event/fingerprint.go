package event

import "crypto/sha256"

// Fingerprint is the SHA-256 of an event's type and value. Two records with one
// id and one fingerprint are one event sent twice; with two fingerprints they
// are two events of a producer that used an id twice.
func (e Event) Fingerprint() []byte {
	hash := sha256.New()
	hash.Write([]byte(e.Type))
	hash.Write([]byte{0})
	hash.Write(e.Payload)
	return hash.Sum(nil)
}
