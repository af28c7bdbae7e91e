package balances

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/big"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"

	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/money"
)

// Account is a tenant's account in one currency.
type Account struct {
	TenantID uuid.UUID
	Code     string
	Currency money.Currency
}

// key is the key of an account's record from one partition of the source.
func (a Account) key(partition int32) []byte {
	return fmt.Appendf(nil, "%s/%s/%s/%d", a.TenantID, a.Code, a.Currency, partition)
}

// Balance is the value of a record on the topic ledger.balances: what the events
// of one partition of billing.events come to in one account. What the account
// holds is the sum over the partitions. Sums are decimal strings: they have no
// largest value.
type Balance struct {
	TenantID  uuid.UUID      `json:"tenant_id"`
	Account   string         `json:"account"`
	Currency  money.Currency `json:"currency"`
	Partition int32          `json:"source_partition"`
	Debit     string         `json:"debit"`
	Credit    string         `json:"credit"`
	Entries   int64          `json:"entries"`       // documents that touched the account
	Offset    int64          `json:"source_offset"` // of the last of them
	First     int64          `json:"source_first"`  // what was before it in the partition was gone before it could be added
}

// sum is what an account comes to in one partition.
type sum struct {
	debit, credit big.Int
	entries       int64
	offset        int64
}

func (s *sum) clone() *sum {
	copied := &sum{entries: s.entries, offset: s.offset}
	copied.debit.Set(&s.debit)
	copied.credit.Set(&s.credit)
	return copied
}

func (s *sum) record(account Account, partition int32, first int64) (event.Record, error) {
	return toRecord(event.LedgerBalances, partition, account.key(partition), Balance{
		TenantID: account.TenantID, Account: account.Code, Currency: account.Currency, Partition: partition,
		Debit: s.debit.String(), Credit: s.credit.String(), Entries: s.entries, Offset: s.offset, First: first,
	})
}

// parseBalance reads a record of ledger.balances that is no tombstone.
func parseBalance(record event.Record) (Account, *sum, int64, error) {
	var b Balance
	err := json.Unmarshal(record.Value, &b)
	s := &sum{entries: b.Entries, offset: b.Offset}
	account := Account{b.TenantID, b.Account, b.Currency}
	_, isDebit := s.debit.SetString(b.Debit, 10)
	_, isCredit := s.credit.SetString(b.Credit, 10)
	switch {
	case err != nil:
	case !isDebit || !isCredit:
		err = fmt.Errorf("debit is %.40q and credit %.40q", b.Debit, b.Credit)
	case b.Partition != record.Partition || string(account.key(record.Partition)) != string(record.Key):
		err = fmt.Errorf("key %.100q is not its account's", record.Key)
	}
	if err != nil {
		return Account{}, nil, 0, fmt.Errorf("%s[%d] at offset %d is no balance: %w", record.Topic, record.Partition, record.Offset, err)
	}
	return account, s, b.First, nil
}

// orderKey is an order of a tenant.
type orderKey struct{ tenantID, orderID uuid.UUID }

// remembered is what is known of an order: the last version of its billing that
// was applied, those before it that have never come, and when the last one
// happened.
type remembered struct {
	Build   uuid.UUID `json:"build"`
	Last    int64     `json:"last"`
	Missing []int64   `json:"missing,omitempty"`
	At      time.Time `json:"at"`
}

// position is how far a partition's state has come. It is written in every
// transaction, so it tells what the other records must come to. Build names the
// attempt at the state: records of another one do not count. Topic is the id of
// the source that Offset is of; "" in what a version has written that kept none.
type position struct {
	Build    uuid.UUID `json:"build"`
	Offset   int64     `json:"offset"`
	First    int64     `json:"first"`
	Accounts int       `json:"accounts"`
	Clock    time.Time `json:"clock"`
	Topic    string    `json:"topic,omitempty"`
}

const (
	orderPrefix    = "order/"
	positionPrefix = "position/"
)

func (k orderKey) key() []byte {
	return fmt.Appendf(nil, "%s%s/%s", orderPrefix, k.tenantID, k.orderID)
}

func parseOrderKey(key string) (orderKey, error) {
	tenant, order, _ := strings.Cut(strings.TrimPrefix(key, orderPrefix), "/")
	tenantID, err := uuid.Parse(tenant)
	if err != nil {
		return orderKey{}, err
	}
	orderID, err := uuid.Parse(order)
	return orderKey{tenantID, orderID}, err
}

func positionKey(partition int32) []byte {
	return strconv.AppendInt([]byte(positionPrefix), int64(partition), 10)
}

func toRecord(topic string, partition int32, key []byte, value any) (event.Record, error) {
	encoded, err := json.Marshal(value)
	if err != nil {
		return event.Record{}, fmt.Errorf("encode record %s: %w", key, err)
	}
	return event.Record{Topic: topic, Partition: partition, Key: key, Value: encoded}, nil
}

// tombstone removes a key.
func tombstone(topic string, partition int32, key []byte) event.Record {
	return event.Record{Topic: topic, Partition: partition, Key: key}
}

// Totals is what the topic ledger.balances says, over all partitions.
type Totals struct {
	// Accounts is debit less credit.
	Accounts map[Account]*big.Int
	// Begun are partitions whose sums begin at an offset above 0: what was
	// before it is not in them.
	Begun map[int32]int64
}

// Collect makes totals of the records of ledger.balances.
func Collect(read func(use func(event.Record) error) error) (Totals, error) {
	type entry struct {
		account Account
		balance *sum
		first   int64
	}
	latest := make(map[string]entry)
	faults := make(map[string]error) // of records that no later one makes up for
	err := read(func(record event.Record) error {
		key := string(record.Key)
		delete(latest, key)
		delete(faults, key)
		if record.Value == nil {
			return nil
		}
		account, balance, first, err := parseBalance(record)
		if err == nil {
			latest[key] = entry{account, balance, first}
		} else {
			faults[key] = err
		}
		return nil
	})
	for _, fault := range faults {
		err = errors.Join(err, fault)
	}
	if err != nil {
		return Totals{}, err
	}
	totals := Totals{Accounts: make(map[Account]*big.Int), Begun: make(map[int32]int64)}
	for key, e := range latest {
		total := totals.Accounts[e.account]
		if total == nil {
			total = new(big.Int)
			totals.Accounts[e.account] = total
		}
		total.Add(total, &e.balance.debit)
		total.Sub(total, &e.balance.credit)
		if e.first > 0 {
			partition, _ := strconv.ParseInt(key[strings.LastIndexByte(key, '/')+1:], 10, 32)
			totals.Begun[int32(partition)] = e.first
		}
	}
	return totals, nil
}
